"""What is known, written out: pages of rules, tables of features, commands to paste."""
