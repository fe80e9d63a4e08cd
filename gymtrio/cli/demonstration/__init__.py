"""The demo: real rollouts, killed and continued, compared with the same rollouts undisturbed."""
