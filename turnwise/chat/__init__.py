"""Messages to tokens and back: chat templates, conversations that keep a context's token ids, parsers of tool
calls."""
