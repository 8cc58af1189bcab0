"""What the command line tells without a traceback."""


class UserFault(Exception):
    """Base of faults that are the user's to mend: the message says what and how.

    Everything else that a command raises is a defect of ours and keeps its traceback.
    """
