"""The labels of links that aren't products or values of options."""

NEXT = "next >"
PREVIOUS = "< prev"
BACK = "back to search"
BUY = "buy now"
SUB_PAGES = ("description", "features")
ATTRIBUTES = "attributes"
"""The sub-page that `show_attrs` adds."""
RESERVED = frozenset({NEXT, PREVIOUS, BACK, BUY, *SUB_PAGES, ATTRIBUTES})
"""Labels that neither a product nor the value of an option may have."""
