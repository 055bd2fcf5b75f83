"""attnsel inside other libraries. Each module imports its library; attnsel imports none of them itself."""
