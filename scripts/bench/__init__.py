"""Speed and accuracy of the ops beside the installed peers."""
