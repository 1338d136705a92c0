"""The files of a session, read and written safely while hostile code changes them."""
