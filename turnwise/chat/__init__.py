"""Messages to tokens and back: chat templates, the append-only bridge, and the token ledger of a context."""
