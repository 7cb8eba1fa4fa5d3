// Samples of one prompt as a tree: what they begin with in common is one node.

/** @typedef {{ token: string, total: number, count: number, ends: number, children: Map<string, Branch> }} Branch */

/** The samples so far. */
export class Samples {
  /**
   * @param {string} prompt
   * @param {number} count
   */
  constructor(prompt, count) {
    this.prompt = prompt;
    this.count = count;
    /** @type {Map<number, { path: Branch, total: number, length: number, reason: string | null }>} */
    this.choices = new Map();
    /** @type {Branch} */
    this.root = { token: "", total: 0, count: 0, ends: 0, children: new Map() };
  }

  /**
   * Takes a chunk of one sample.
   * @param {any} choice
   */
  add(choice) {
    const known = this.choices.get(choice.index) ?? { path: this.root, total: 0, length: 0, reason: null };
    this.choices.set(choice.index, known);
    for (const each of choice.logprobs?.content ?? []) {
      let next = known.path.children.get(each.token);
      if (!next) {
        next = { token: each.token, total: 0, count: 0, ends: 0, children: new Map() };
        known.path.children.set(each.token, next);
      }
      known.total += each.logprob;
      known.length += 1;
      next.count += 1;
      next.total = known.total / known.length;
      known.path = next;
    }
    if (choice.finish_reason && known.reason === null) {
      known.reason = choice.finish_reason;
      known.path.ends += 1;
    }
  }

  /**
   * The tree, parents before their children.
   * @returns {import("./trees.js").TreeNode[]}
   */
  nodes() {
    /** @type {import("./trees.js").TreeNode[]} */
    const found = [{ id: "root", parent: null, label: `${this.count} samples`, score: null, fate: "", text: this.prompt }];
    /** @type {[Branch, string][]} */
    const next = [...this.root.children.values()].reverse().map((branch) => [branch, "root"]);
    while (next.length) {
      const [first, parent] = /** @type {[Branch, string]} */ (next.pop());
      let branch = first, text = first.token;
      while (branch.children.size === 1 && !branch.ends) {
        branch = [...branch.children.values()][0];
        text += branch.token;
      }
      const id = String(found.length);
      const many = first.count === 1 ? "1 sample" : `${first.count} samples`;
      found.push({ id, parent, label: many, score: branch.total, fate: branch.ends ? "ended" : "", text });
      next.push(...[...branch.children.values()].reverse().map((/** @type {Branch} */ child) => /** @type {[Branch, string]} */ ([child, id])));
    }
    return found;
  }
}
