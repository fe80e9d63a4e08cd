"""The control plane: phases, the participant's owner, and the controller's side."""
