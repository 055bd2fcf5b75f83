"""The words that rules, the choice and reports speak in."""
