// What the tests measure in a page: the contrast of its texts, and what the keyboard can reach.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  function rgba(colour) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  }
  const over = ([r, g, b, a], below) => [r, g, b].map((each, i) => each * a + below[i] * (1 - a));
  function ground(element) {
    const layers = [];
    for (let each = element; each; each = each.parentElement) layers.push(rgba(getComputedStyle(each).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  }
  function light(colour) {
    const [r, g, b] = colour.map((each) => {
      const part = each / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  function ratio(a, b) {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  }
  const isSeen = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });

  window.looks = {
    /** Texts whose contrast is below WCAG's AA, and the number of those looked at. */
    contrast() {
      const found = [];
      let count = 0;
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
        if (!text || !isSeen(element) || element.closest(":disabled, title, option, script, noscript")) continue;
        const style = getComputedStyle(element), size = parseFloat(style.fontSize);
        const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        const below = ground(element), is = ratio(over(rgba(style.color), below), below);
        count += 1;
        if (is < (isLarge ? 3 : 4.5)) found.push(`${is.toFixed(2)} ${element.className} ${text.slice(0, 40)}`);
      }
      for (const field of document.querySelectorAll("input, textarea, select")) {
        if (!isSeen(field)) continue;
        const below = ground(field), border = rgba(getComputedStyle(field).borderTopColor);
        for (const [what, colour] of [["text", getComputedStyle(field).color], ["hint", getComputedStyle(field, "::placeholder").color]]) {
          count += 1;
          const is = ratio(over(rgba(colour), below), below);
          if (is < 4.5) found.push(`${is.toFixed(2)} ${what} of ${field.id}`);
        }
        const outside = ground(field.parentElement);
        if (field.type !== "checkbox" && ratio(over(border, outside), outside) < 3) found.push(`border of ${field.id}`);
      }
      return { found, count };
    },
    /** Elements that can be used, as numbers that they are given. */
    usable() {
      const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")];
      return all.filter((each) => isSeen(each) && !each.disabled).map((each, i) => (each.dataset.usable = String(i)));
    },
    /** The element that has the focus: its number, its name, and whether its focus is seen. */
    focused() {
      const each = document.activeElement, style = getComputedStyle(each);
      return { number: each.dataset.usable ?? null, name: each.textContent.slice(0, 30), seen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 };
    },
    /** Things that can be used and have no name, and things whose names are of no use. */
    nameless() {
      const all = [...document.querySelectorAll("button, input, select, textarea, progress, [role='meter'], [role='img'], [role='region'], [role='log']")];
      return all
        .filter((each) => isSeen(each) && !each.getAttribute("aria-label") && !each.textContent.trim() && !(each.labels && each.labels.length))
        .map((each) => each.outerHTML.slice(0, 80));
    },
  };
})();
