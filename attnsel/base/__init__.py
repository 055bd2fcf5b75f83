"""What every room uses and that knows nothing of attention."""
