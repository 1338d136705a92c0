# Loads the variables in FILE but those in LEAVE, and sets `told`.
told <- (function() {
  sink("/dev/null")
  on.exit(sink())
  home <- globalenv()
  names <- load(FILE, home)
  saved <- get(".kernel_mcp_saved", home)
  left <- c(".kernel_mcp_saved", intersect(names, as.character(jsonlite::fromJSON(LEAVE))))
  rm(list = left, envir = home)
  names <- setdiff(names, left)
  seed <- get0(".Random.seed", home, inherits = FALSE)
  lost <- structure(list(), names = character())
  try <- function(label, code) tryCatch(code, error = function(reason)
    lost[[label]] <<- paste("it cannot be set now:", conditionMessage(reason)))
  for (each in setdiff(saved$search, search())) {
    label <- paste("attached", each)
    if (label %in% names(saved$others))
      try(label, attach(saved$others[[label]], name = each, warn.conflicts = FALSE))
    else if (startsWith(each, "package:") && !suppressWarnings(suppressMessages(
      require(sub("package:", "", each), character.only = TRUE, quietly = TRUE))))
      lost[[each]] <- "it cannot be attached now"
  }
  for (label in grep("^setting ", names(saved$others), value = TRUE)) try(label, {
    value <- saved$others[[label]]
    kind <- sub("^setting ([^(]*).*", "\\1", label)
    key <- sub("^[^(]*\\((.*)\\)$", "\\1", label)
    one <- structure(list(value), names = key)
    switch(kind,
      options = options(one),
      Sys.getenv = if (is.null(value)) Sys.unsetenv(key) else do.call(Sys.setenv, one),
      Sys.getlocale = Sys.setlocale(key, value),
      getwd = setwd(value))
  })
  for (each in intersect(saved$locked, names)) lockBinding(as.name(each), home)
  methods::cacheMetaData(home, TRUE) # so that classes and methods are found
  if (!is.null(seed)) assign(".Random.seed", seed, home)
  list(names = I(names[!startsWith(names, ".")]), lost = lost)
})()
