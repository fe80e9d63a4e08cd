"""The agent's participant: sessions, their activations, and what a checkpoint keeps of them."""
