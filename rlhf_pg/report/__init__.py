"""Reports of a run on itself: numbers, lines, trackers, pages."""
