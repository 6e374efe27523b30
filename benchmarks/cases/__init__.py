"""The cases, a function each: settings and shapes in, figures out."""
