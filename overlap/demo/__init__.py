"""`overlap demo`: one model trained twice on real images, plainly and overlapped, and compared."""
