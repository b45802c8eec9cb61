// A word that begins with "-" is left out of the results: without its dashes, options such as --overwrite are found.
// "zero3" and "stage3" are two words on the pages.
document.addEventListener("input", ({ target }) => {
  if (!target.matches(".md-search__input")) return
  const words = target.value.replace(/(^|\s)-+/g, "$1").replace(/\b(zero|stage)(?=\d)/gi, "$1 ")
  if (words !== target.value) target.value = words
}, true)
