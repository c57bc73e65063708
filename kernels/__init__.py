"""The planner's steps, one a file. They know nothing of samplers, datasets or processes."""
