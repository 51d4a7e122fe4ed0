"""WebShop as text: a shop with generated products, a search and pages to click through."""
