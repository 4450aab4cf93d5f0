"""The others, each in a virtual environment of its own, and how they are driven."""
