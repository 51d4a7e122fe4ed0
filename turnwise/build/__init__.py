"""From a config to objects: the one room that knows every concrete class."""
