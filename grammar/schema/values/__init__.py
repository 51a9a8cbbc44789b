"""The rules of each JSON type: strings, numbers, arrays, objects, and the text around them."""
