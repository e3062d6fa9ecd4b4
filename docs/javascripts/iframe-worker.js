// Browsers refuse workers to pages of the file system. There, search runs in a hidden frame of the page instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      const event = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }))
      inner.postMessage = (data) => setTimeout(() => event(this, data))
      this.ready = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        frame.contentDocument.body.append(script)
      })
      this.postMessage = (data) => this.ready.then(() => event(inner, data))
    }
  }
}
