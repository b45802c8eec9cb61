// A word that begins with "-" is left out of the results: without its dashes, options such as --overwrite are found.
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input") && /(^|\s)-/.test(target.value))
    target.value = target.value.replace(/(^|\s)-+/g, "$1")
}, true)
