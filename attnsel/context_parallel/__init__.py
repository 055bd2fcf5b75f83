"""One sequence over many ranks. What needs torch is imported when it is asked for."""
