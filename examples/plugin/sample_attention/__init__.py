"""Attention in two matrix products: a sample of a plug-in for attnsel."""
