"""The course: its lessons (src/), and the tools that build them, hand them out and open them."""
