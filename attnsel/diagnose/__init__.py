"""What ran, and why: of logs, of a watched program, of many ranks."""
