# Writes the variables but those in LEAVE to FILE, at most MOST bytes, and sets `told`.
#
# Nothing that refers to memory outside R can be saved. serialize() passes each reference to
# `refhook`, which finds it. An environment is searched once, however many variables share it.
told <- (function() {
  sink("/dev/null") # of what code of promises prints
  on.exit(sink())
  home <- globalenv()
  counter <- gzfile("/dev/null", "wb", compression = 0) # of bytes
  on.exit(close(counter), add = TRUE)
  left <- as.character(jsonlite::fromJSON(LEAVE))
  names <- setdiff(ls(home, all.names = TRUE), left)
  lazy <- requireNamespace("rlang", quietly = TRUE) & length(names)
  lazy <- if (lazy) unname(rlang::env_binding_are_lazy(home, names)) else logical(length(names))

  # settings that are not as in a fresh kernel, and data frames and lists that are attached
  first <- Find(Negate(is.null), lapply(sys.frames(), function(frame) get0("kernel_mcp", frame)))
  if (is.null(first)) first <- list(state = list, fresh = list(), search = search())
  now <- first$state()
  others <- union(names(now), names(first$fresh))
  others <- Filter(function(each) !identical(now[[each]], first$fresh[[each]]), others)
  others <- structure(lapply(others, function(each) now[[each]]), names = others)
  search <- setdiff(rev(search()), c(".GlobalEnv", first$search))
  for (each in search[!startsWith(search, "package:")])
    others[[paste("attached", each)]] <- as.list(as.environment(each), all.names = TRUE)
  others <- others[setdiff(names(others), left)]

  place <- function(pointer) deparse(pointer, control = NULL)
  # pointers to nothing, or to what R makes anew, are no loss
  harmless <- list(methods::new("externalptr"))
  for (each in names[startsWith(names, ".__C__")])
    harmless <- c(harmless, list(attr(get(each, home), "versionKey")))
  harmless <- vapply(Filter(Negate(is.null), harmless), place, "")
  harmless <- c(harmless, place(.Internal(address(NULL))))
  opened <- Filter(function(each) each > 2, as.integer(rownames(showConnections(all = TRUE))))
  opened <- vapply(opened, function(each) place(attr(getConnection(each), "conn_id")), "")

  spaces <- list()
  numbers <- new.env()
  node <- function(why = "", size = 0, to = integer()) list(why = why, size = size, to = to)
  look <- function(value, own = "") {
    if (is.atomic(value) && is.null(attributes(value)) && !is.character(value))
      return(node(size = as.numeric(utils::object.size(value))))
    before <- seek(counter)
    why <- ""
    to <- new.env()
    note <- function(reference) {
      if (typeof(reference) != "environment") {
        key <- place(reference)
        if (key %in% harmless) return("") # of data.table, with the address of an object
        why <<- if (key %in% opened) "it is an open connection" else "it refers to memory outside R"
      } else if ((key <- place(.Internal(address(reference)))) != own) {
        if (is.null(numbers[[key]])) {
          spaces[[length(spaces) + 1L]] <<- reference
          assign(key, length(spaces), numbers)
        }
        assign(key, numbers[[key]], to)
        return("") # it is searched alone
      }
      NULL
    }
    tryCatch(serialize(value, counter, xdr = FALSE, refhook = note), error = function(reason)
      why <<- paste("it cannot be saved:", conditionMessage(reason)))
    node(why, seek(counter) - before, as.integer(unlist(as.list(to))))
  }
  nodes <- lapply(seq_along(names), function(i) {
    if (nchar(names[i]) > 200) node("its name is too long")
    else if (bindingIsActive(as.name(names[i]), home)) node("it is an active binding")
    else if (lazy[i]) node()
    else look(get(names[i], home))
  })
  nodes <- c(nodes, lapply(others, look))
  mine <- seq_along(nodes)
  while (length(spaces) > length(nodes) - length(mine)) {
    space <- spaces[[length(nodes) - length(mine) + 1L]]
    nodes[[length(nodes) + 1L]] <- look(space, place(.Internal(address(space))))
  }
  why <- vapply(nodes, `[[`, "", "why")
  size <- vapply(nodes, `[[`, 0, "size")
  to <- lapply(nodes, function(each) each$to + length(mine))

  # what refers to something that cannot be saved cannot be saved either
  users <- split(rep(seq_along(to), lengths(to)), factor(unlist(to), seq_along(to)))
  wave <- which(nzchar(why))
  while (length(wave)) {
    from <- rep(wave, lengths(users[wave]))
    wave <- unlist(users[wave], use.names = FALSE)
    fresh <- !nzchar(why[wave]) & !duplicated(wave)
    wave <- wave[fresh]
    why[wave] <- why[from[fresh]]
  }
  if (sum(size[!nzchar(why)]) > MOST) { # small ones first
    counted <- logical(length(nodes))
    for (i in mine[order(size[mine])]) if (!nzchar(why[i])) {
      with <- counted
      wave <- i
      while (length(wave <- wave[!with[wave]])) {
        with[wave] <- TRUE
        wave <- unique(unlist(to[wave]))
      }
      if (sum(size[with]) > MOST) why[i] <- "too large to be saved"
      else counted <- with
    }
  }
  why[utils::tail(which(!nzchar(why[seq_along(names)])), -20000)] <- "there are too many variables"

  write <- function() {
    good <- names[!nzchar(why[seq_along(names)])]
    view <- new.env(parent = home)
    view$.kernel_mcp_saved <- list(
      search = search,
      others = others[!nzchar(why[length(names) + seq_along(others)])],
      locked = Filter(function(each) bindingIsLocked(as.name(each), home), good)
    )
    to <- file(FILE, "wb")
    tryCatch(
      save(list = c(good, ".kernel_mcp_saved"), envir = view, file = to, eval.promises = FALSE),
      finally = ended <- suppressWarnings(close(to))
    )
    if (!identical(ended, 0L)) stop("the disk is full")
  }
  tryCatch(write(), error = function(reason) { # such as of environments in 10,000 others
    for (i in which(!nzchar(why[seq_along(names)]) & !lazy)) tryCatch(
      serialize(get(names[i], home), counter),
      error = function(reason) why[i] <<- paste("it cannot be saved:", conditionMessage(reason))
    )
    write()
  })
  good <- which(!nzchar(why[seq_along(names)]))
  shown <- good[!startsWith(names[good], ".")]
  lost <- which(nzchar(why[mine]))
  list(
    names = I(names[shown]), stored = I(names[good]), groups = list(I(names[good])),
    lost = as.list(structure(why[lost], names = substr(c(names, names(others))[lost], 1, 200))),
    variables = lapply(shown, function(i) list(name = names[i], size = size[i], preview = "",
      type = if (lazy[i]) "promise" else class(get(names[i], home))[1]))
  )
})()
