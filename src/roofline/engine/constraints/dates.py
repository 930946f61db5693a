"""Dates and times as patterns: llguidance's own let days through that no calendar has.

The forms are RFC 3339's that Python's `datetime` reads too: years from 0001 on, `T` and `Z` in capitals, at most nine
digits of a second, and no leap seconds.
"""

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, of which 00 is none
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)"
_DAYS_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
_DAY = f"(?:(?:0[1-9]|1[0-2])-{_DAYS_28}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"  # of any year
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = f"{_HOUR}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
