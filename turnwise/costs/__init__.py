"""What a run costs: memory, seconds, and bytes on the disk."""
