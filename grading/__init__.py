"""The teaching machinery, importable in every notebook. Importing it is cheap, and never imports nbgrader."""
