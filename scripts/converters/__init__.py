"""What gradclip_convert.py is made of: errors, layouts, and one module for each kind of input."""
