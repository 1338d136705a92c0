"""Code by which the kernels of a language answer questions that Jupyter's protocol lacks.

Every snippet prints JSON and leaves no variable. CODE, MATCH, PATTERN and OFFSET stand for values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

from kernel_mcp.kernelspecs.snapshots import DumpCode
from kernel_mcp.kernelspecs.spec import Kernelspec
from kernel_mcp.policy import Policy
from kernel_mcp.policy.missing import advice
from kernel_mcp.records import dataclass
from kernel_specs.restricted.config import HOST, NETWORK

MOST_SEARCHED = 32 * 1024
"""Characters at the end of a message that are searched for what is missing."""
_OPEN = (
    "A cell with CODE adds it to this session's library, from a repository to which the network is "
    "open: info shows the hosts"
)
_SHUT = (
    "The operator can install it on this machine, or open the network to a repository (--network "
    "HOST), from which a cell with CODE adds it"
)


@dataclass(frozen=True, slots=True)
class Language:
    """Snippets of one language; an empty one is a question that its kernels do not answer.

    options    names of programs, each with an option that it gets besides
    start      makes a fresh kernel ready, and prints null
    variables  prints {"variables": objects as `list_variables` has them, "omitted": number of
               others}, for names that contain MATCH or fit the regular expression PATTERN, from
               number OFFSET on
    packages   prints an object of [version, True if the session has installed it] by name
    check      parses CODE and prints null, or [line, column, message]
    programs   True if what programs write, which cells start, is not sent as output of cells
    packaging  how cells add packages and remove them, as a sentence
    installs   code that installs package NAME
    unfound    matches an error about a package that is not installed, in its first group
    unreached  matches a message about a host that cannot be reached
    renewed    what a kernel prints if a cell has ended the process that runs cells
    dump       writes and reads dumps of variables
    """

    options: tuple[tuple[str, str], ...] = ()
    start: str = ""
    variables: str = ""
    packages: str = ""
    check: str = ""
    programs: bool = False
    packaging: str = ""
    installs: str = ""
    unfound: re.Pattern[str] | None = None
    unreached: re.Pattern[str] | None = None
    renewed: str = ""
    dump: DumpCode | None = None

    def advice(self, text: str, policy: Policy) -> str:
        """Return advice on what an error or a warning says that is missing; empty for none."""
        text = text[-MOST_SEARCHED:]
        if self.unfound is not None and (found := self.unfound.search(text)):
            way = _OPEN if policy.network else _SHUT
            code = self.installs.replace("NAME", found[1])
            return f"{found[1]} is not installed. {way.replace('CODE', code)}"
        if self.unreached is not None and self.unreached.search(text):
            return advice(HOST if policy.network else NETWORK, "", policy, "")
        return ""


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _r(body: str) -> str:
    """Return the snippet that prints the variable `told`, set by code that sees only base R.

    Functions of users with the names of those of R are not called, and `.Last.value` stays.
    """
    return f"""base::local({{
{body}
cat(jsonlite::toJSON(told, auto_unbox = TRUE, null = "null", na = "null", digits = NA))
invisible(get0(".Last.value", baseenv()))
}}, base::new.env(parent = base::baseenv()))"""


_R_VARIABLES = _r("""\
space <- globalenv()
clean <- function(text) iconv(text, "UTF-8", "UTF-8", "byte")
# promises are found without their values, if rlang is there, as it is with ggplot2
lazy <- function(name) requireNamespace("rlang", quietly = TRUE) &&
  rlang::env_binding_are_lazy(space, name)
few <- function(value) switch(typeof(value), # whether its size is found soon
  character = length(value) <= 1e5,
  list = length(value) <= 1e3 && all(vapply(unclass(value), few, NA)),
  TRUE)
shown <- function(value) {
  if (is.function(value)) return(sub(" *NULL$", "", paste(deparse(args(value)), collapse = " ")))
  paste(utils::capture.output(utils::str(value, give.head = FALSE, max.level = 1, list.len = 5)),
    collapse = " ")
}
one <- function(name) {
  known <- list(name = clean(name), type = "?")
  on.exit(setTimeLimit())
  setTimeLimit(elapsed = 0.5)
  tryCatch({
    if (bindingIsActive(as.name(name), space)) return(c(known["name"], type = "active binding"))
    if (lazy(name)) return(c(known["name"], type = "promise"))
    value <- get(name, space)
    known$type <- clean(class(value)[1])
    known$length <- length(value)
    known$shape <- I(as.integer(dim(value)))
    if (few(value)) known$size <- as.numeric(utils::object.size(value))
    known$preview <- clean(substr(trimws(gsub("[[:space:]]+", " ", shown(value))), 1, 120))
    known
  }, error = function(reason) known)
}
names <- ls(space)
keys <- clean(names)
names <- names[grepl(MATCH, keys, fixed = TRUE) | grepl(PATTERN, keys, perl = TRUE)]
place <- seq_along(names)
place <- place[place > OFFSET & place <= OFFSET + 500]
told <- list(variables = lapply(names[place], one),
  omitted = max(0, length(names) - OFFSET - length(place)))""")
_R_PACKAGES = _r("""\
found <- utils::installed.packages()
found <- found[!duplicated(found[, "Package"]), , drop = FALSE]
own <- found[, "LibPath"] %in% normalizePath(Sys.getenv("R_LIBS_USER"), mustWork = FALSE)
told <- Map(list, found[, "Version"], own)""")
_R_CHECK = _r("""\
told <- tryCatch({ parse(text = CODE, keep.source = FALSE); NULL }, error = function(reason) {
  message <- conditionMessage(reason)
  place <- regmatches(message, regexec("^<text>:([0-9]+):([0-9]+): *([^\\n]*)", message))[[1]]
  if (length(place) < 4) list(1, 0, message)
  else list(as.integer(place[2]), as.integer(place[3]), place[4])
})""")
LANGUAGES: Mapping[str, Language] = {
    "bash": Language(renewed="Restarting Bash"),
    "r": Language(
        options=(("R", "--no-restore-data"),),  # a fresh kernel has no variables
        start=_file("start.R"),
        variables=_R_VARIABLES,
        packages=_R_PACKAGES,
        check=_R_CHECK,
        programs=True,
        packaging=(
            'A cell with install.packages("NAME") adds packages to this session\'s library, where '
            "the network is open to a repository (--network); remove.packages removes them."
        ),
        installs='install.packages("NAME")',
        unfound=re.compile(r"there is no package called .([\w.]{1,100})"),
        unreached=re.compile(r"unable to access index for|cannot open URL '|not resolve host"),
        dump=DumpCode(
            _r(_file("save.R")),
            _r(_file("load.R")),
            "Graphics settings, files in tempdir() and what packages have in memory start anew",
        ),
    ),
}
"""The known languages, by the lower-case name in a kernel spec."""


def language_of(spec: Kernelspec) -> Language:
    """Return the language of a kernel spec, which may be one without snippets."""
    return LANGUAGES.get(spec.language.lower(), Language())
