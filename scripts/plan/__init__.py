"""What a training recipe needs and how long it takes."""
