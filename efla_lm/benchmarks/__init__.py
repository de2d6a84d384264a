"""Speed and accuracy of the ops beside the installed peers; `python -m scripts.bench` is the command."""
