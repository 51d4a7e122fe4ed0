"""The embedded server: continuous batching in this process, with the KV of a conversation kept across its
turns."""
