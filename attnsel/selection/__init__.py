"""The choice: rules are asked, candidates ranked, ways out found."""
