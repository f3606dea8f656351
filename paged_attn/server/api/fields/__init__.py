"""Fields of bodies that have a form of their own: counted before anything is built from them, and what an answer has to follow."""
