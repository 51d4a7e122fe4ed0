"""Rows of files and data sets, checked as they are read, and the functions that reward what was done with them."""
