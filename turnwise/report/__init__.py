"""Pictures and tables made from run folders. Reads files only."""
