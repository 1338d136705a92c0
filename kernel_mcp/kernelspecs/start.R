# Runs once in each R kernel, as a hidden cell; prints null if it fits.
#
# Packages are installed into the workspace. IRkernel evaluates cells by the package evaluate. Old
# versions of it lose the output of an expression that is interrupted, report no overflow of the C
# stack, and collect lines in time that grows with the square of their number. Code of users names
# functions as those of R: here only base is seen.
base::local({
  most <- 1e6 # characters of a text
  own <- path.expand("~/.R/library") # the session's packages
  Sys.setenv(R_LIBS_USER = own)
  .libPaths(c(own, .libPaths())) # if it is there
  put <- function(space, name, value) {
    unlockBinding(name, space)
    assign(name, value, space)
  }
  install <- utils::install.packages
  body(install) <- bquote({
    if (dir.create(.(own), recursive = TRUE, showWarnings = FALSE))
      .libPaths(c(.(own), .libPaths()))
    .(body(install))
  })
  put(asNamespace("utils"), "install.packages", install)
  put(as.environment("package:utils"), "install.packages", install)
  space <- asNamespace("evaluate")
  call <- get0("evaluate_call", space, inherits = FALSE)
  known <- is.function(call) && all(c("try", "watchout", "eHandler") %in% all.names(body(call)))
  # what save.R compares; a setting is called as the code that shows it
  state <- function() {
    called <- function(values, format) structure(values, names = sprintf(format, names(values)))
    parts <- c("LC_COLLATE", "LC_CTYPE", "LC_MONETARY", "LC_NUMERIC", "LC_TIME")
    c(
      called(options()[setdiff(names(options()), "try.outFile")], "setting options(%s)"),
      called(as.list(Sys.getenv()), "setting Sys.getenv(%s)"),
      called(sapply(parts, Sys.getlocale, simplify = FALSE), "setting Sys.getlocale(%s)"),
      list("setting getwd()" = getwd())
    )
  }
  for (frame in sys.frames()) if (methods::is(executor <- get0(".self", frame), "Executor")) {
    kernel <- environment(executor$handle_stdin)
    options(browser = function(url) message("[there is no web browser here]"))
    put(baseenv(), "browser", function(...) message("[nobody can be asked here: no browser]"))
    # a value that cannot be shown, such as a plot of a column that is not there, is an error
    put(as.environment(executor), "handle_display_error", function(reason) {
      if (!is.null(executor$err$ename)) return()
      text <- paste("Error while showing a value:", toString(reason))
      executor$err <- list(ename = "ERROR", evalue = text, traceback = list(text))
      executor$send_response("error", executor$current_request, "iopub", executor$err)
    })
    send <- executor$send_response
    told <- character() # names of variables that the server knows
    executor$send_response <- function(kind, request, channel, content) {
      if (kind == "execute_reply") {
        now <- ls(globalenv(), sorted = FALSE)
        if (isTRUE(request$content$store_history)) # it is of a cell
          content$names <- list(I(setdiff(now, told)), I(setdiff(told, now)))
        told <<- now
      }
      if (utils::object.size(content) > 12e6) # of a message that would be refused
        content <- rapply(content, substr, "character", how = "replace", start = 1, stop = most)
      send(kind, request, channel, content)
    }
    # outside of cells an interrupt would end the kernel: there it waits, and is dropped
    handle <- kernel$handle_shell
    if (known) put(kernel, "handle_shell", function() {
      .Internal(interruptsSuspended(TRUE))
      tryCatch(allowInterrupts(Sys.sleep(0)), interrupt = identity)
      handle()
    })
    # each run counts the frames around a cell by a trial cell, a fifth of its time: once is enough
    run <- executor$execute
    steps <- as.list(body(run))
    trial <- which(vapply(steps, function(each) "nframe" %in% all.names(each), NA))
    if (length(trial) == 1) {
      steps[[trial]] <- bquote(if (!length(nframe)) .(steps[[trial]]))
      once <- as.function(c(formals(run), as.call(steps)), environment(run))
      put(as.environment(executor), "execute", once)
      executor$nframe <- integer()
    }
    first <- list(state = state, fresh = state(), search = search())
    assign("kernel_mcp", first, as.environment(executor))
    break
  }
  if (known) {
    own <- list2env(list(most = most), parent = space)
    local(envir = own, {
      try <- function(expr, silent) {
        outer <- parent.frame()
        if (!identical(get("output_handler", outer)$text, identity)) # it is of a cell
          .Internal(interruptsSuspended(FALSE))
        on.exit(.Internal(interruptsSuspended(TRUE)))
        tryCatch(expr, error = function(reason) {
          if (!any(vapply(get("output", outer), identical, NA, reason)))
            get("eHandler", outer)(reason)
        })
      }
      watchout <- function(debug) {
        outer <- parent.frame()
        con <- file("", "w+b")
        sink(con)
        depth <- sink.number()
        take <- function(tell) {
          if (!isTRUE(tryCatch(isOpen(con), error = identity))) return() # code has closed all
          bytes <- raw()
          while (length(more <- readBin(con, "raw", most))) bytes <- c(bytes, more)
          text <- iconv(rawToChar(bytes[bytes != 0]), "UTF-8", "UTF-8", "byte")
          for (part in seq_len(ceiling(nchar(text) / most)))
            tell(substr(text, (part - 1) * most + 1, part * most))
        }
        list(
          get_new = function(plot = FALSE, incomplete_plots = FALSE, text_callback = identity,
                             graphics_callback = identity) {
            shown <- if (plot) plot_snapshot(incomplete_plots)
            if (!is.null(shown)) graphics_callback(shown)
            take(text_callback)
            list(shown)[!is.null(shown)]
          },
          close = function() {
            while (sink.number() >= depth) sink()
            take(outer$output_handler$text)
            tryCatch(close(con), error = identity)
          },
          get_con = function() con
        )
      }
    })
    environment(call) <- own
    put(space, "evaluate_call", call)
  }
  if (known) cat("null")
}, base::new.env(parent = base::baseenv()))
