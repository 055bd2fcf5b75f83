"""The hands: one folder per backend that really runs attention, each behind ``contract``."""
