// What the search worker gets for the words of a reader: options without their dashes, "zero3" and "stage3" as the two
// words they are on the pages, whole words but for the last, which may be unfinished, the name of a member before that of
// its class, and long words with one letter wrong. Words in quotation marks stay as they are.
const post = Worker.prototype.postMessage
const QUERY = 2
Worker.prototype.postMessage = function (message, ...rest) {
  if (message.type === QUERY && !message.data.includes('"')) {
    const words = message.data.replace(/(^|\s)-+/g, "$1").replace(/\b(zero|stage)(?=\d)/gi, "$1 ").match(/\S+/g) || []
    const exact = words.map((word, i) =>
      /\w\.\w+$/.test(word) ? word.replace(/\.(?=\w+$)/, "^1 ") + "^2" : i < words.length - 1 ? word + "^1" : word)
    const fuzzy = words.filter(word => /^\w{6,}$/.test(word)).map(word => word + "~1")
    message = { ...message, data: [...exact, ...fuzzy].join(" ") }
  }
  return post.call(this, message, ...rest)
}
