"""Looking at what decoding did: traces of rounds, and speculation beside plain decoding."""
