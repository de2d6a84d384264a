"""Speed and accuracy of the layers around the mixers."""
