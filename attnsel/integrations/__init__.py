"""Other libraries' doors to attnsel. Each module imports its library, and nothing imports it unasked."""
