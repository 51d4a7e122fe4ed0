"""Episodes that people and scripts play: `turnwise play`, and demonstrations."""
