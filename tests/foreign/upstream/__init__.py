"""Other libraries' own tests, run from a checkout of theirs on what takes the library's place here."""
