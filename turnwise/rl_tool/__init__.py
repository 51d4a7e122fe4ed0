"""Training, evaluation and export as the actions of one tool, which takes dicts and answers with JSON."""
