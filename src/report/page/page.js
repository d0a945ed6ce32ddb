// What a report's page can do: tables that are sorted and searched, charts that say what is under the pointer or the
// arrow keys. Built into the program; the page's policy allows this script by its hash and no other. Text from the
// report only ever becomes text: textContent, never markup.
"use strict";

(() => {
  const kRowsPerPage = 100;

  // -------------------------------------------------------------------------------------------------------------------
  // Numbers
  // -------------------------------------------------------------------------------------------------------------------

  /** A cell as a number: the report has what JSON cannot carry as text. Null where there is none. */
  function numberOf(cell) {
    if (cell === null || typeof cell === "number") return cell;
    if (cell === "inf") return Infinity;
    if (cell === "-inf") return -Infinity;
    return cell === "" ? null : Number(cell);
  }

  const grouping = new Intl.NumberFormat("en-US", {maximumFractionDigits: 0});

  /** Six significant digits; the whole number is in the cell's title. */
  function shortNumber(number) {
    if (!Number.isFinite(number)) return Number.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
    if (number === 0) return "0";
    const size = Math.abs(number);
    const text = size < 1e-4 || size >= 1e7 ? number.toExponential(5) : number.toPrecision(6);
    return text.includes("e") ? text.replace(/\.?0+e/, "e") : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  }

  const columnKinds = {
    name: {text: true, show: (cell) => cell},
    text: {text: true, show: (cell) => cell},
    status: {
      text: true, show: (cell) => cell,
      style: (cell) => (["equal", "pass", "passed"].includes(cell) ? "good-text" : cell === "changed" ? "" : "alarm-text"),
    },
    number: {
      show: (cell) => {
        const number = numberOf(cell);
        if (typeof cell === "string" && /^-?\d+$/.test(cell)) return grouping.format(BigInt(cell));  // exact: in full
        return typeof cell === "string" && Number.isNaN(number) ? cell : shortNumber(number);
      },
      style: (cell) => (["nan", "inf", "-inf"].includes(cell) ? "alarm-text" : ""),
    },
    count: {
      show: (cell) => (typeof cell === "string" ? grouping.format(BigInt(cell)) : grouping.format(cell)),
      style: (cell) => (cell === 0 ? "zero" : ""),
    },
    share: {
      show: (cell) => (Number.isFinite(numberOf(cell)) ? `${(100 * cell).toFixed(2)} %` : String(cell)),
      style: (cell) => (Number.isFinite(numberOf(cell)) ? "" : "alarm-text"),
    },
  };

  // -------------------------------------------------------------------------------------------------------------------
  // Tables
  // -------------------------------------------------------------------------------------------------------------------

  function makeTable(root) {
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    const columns = data.columns.map(([label, kind, meaning]) => ({label, kind, meaning, ...columnKinds[kind]}));
    const rows = data.rows;
    const noun = root.dataset.noun;
    const search = root.querySelector("input");
    const output = root.querySelector("output");
    const pages = root.querySelector(".pages");
    const [previous, next] = pages.querySelectorAll("button");
    const body = root.querySelector("tbody");
    const textColumns = columns.flatMap((column, c) => (column.text ? [c] : []));

    let haystacks = null;  // made at the first search
    let found = rows.map((_, r) => r);
    let order = found;  // of all rows
    let sorted = null;  // {column, descending}
    let page = 0;

    const head = root.querySelector("thead").insertRow();
    for (const [c, column] of columns.entries()) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.className = column.text ? "" : "n";
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.label;
      button.title = column.meaning || column.label;
      button.addEventListener("click", () => sortBy(c));
      cell.append(button);
      head.append(cell);
    }

    /** Numbers fall at first, text rises; then the other way; then the report's own order. */
    function sortBy(c) {
      const descendingFirst = !columns[c].text;
      if (!sorted || sorted.column !== c) {
        sorted = {column: c, descending: descendingFirst};
      } else if (sorted.descending === descendingFirst) {
        sorted.descending = !descendingFirst;
      } else {
        sorted = null;
      }
      order = rows.map((_, r) => r);
      if (sorted) {
        const sign = sorted.descending ? -1 : 1;
        // Text that is no number, such as "nan", is larger than any number; a cell without a value is last either way.
        const value = (row) => {
          const cell = row[c];
          if (columns[c].text) return cell === "" ? null : cell;
          const number = numberOf(cell);
          return number === null ? null : Number.isNaN(number) ? Infinity : number;
        };
        const isNan = (r) => !columns[c].text && Number.isNaN(numberOf(rows[r][c]));
        const values = rows.map(value);
        const compare = new Intl.Collator("en", {numeric: true}).compare;
        order.sort((a, b) => {
          const left = values[a], right = values[b];
          if (left === null || right === null) return (left === null) - (right === null) || a - b;
          const difference = columns[c].text ? compare(left, right) : left < right ? -1 : left > right ? 1 : isNan(a) - isNan(b);
          return sign * difference || a - b;
        });
      }
      for (const [i, cell] of [...head.cells].entries()) {
        if (sorted && sorted.column === i) {
          cell.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
        } else {
          cell.removeAttribute("aria-sort");
        }
      }
      choose();
    }

    /** The rows that have every word of the search in any of their texts. */
    function choose() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (words.length > 0 && !haystacks) {
        haystacks = rows.map((row) => textColumns.map((c) => row[c] ?? "").join("\n").toLowerCase());
      }
      found = words.length === 0 ? order : order.filter((r) => words.every((word) => haystacks[r].includes(word)));
      page = 0;
      show();
    }

    function show() {
      const begin = page * kRowsPerPage;
      const shown = found.slice(begin, begin + kRowsPerPage);
      const fragment = document.createDocumentFragment();
      for (const r of shown) {
        const line = document.createElement("tr");
        for (const [c, column] of columns.entries()) {
          const cell = document.createElement("td");
          const value = rows[r][c];
          const style = value !== null && value !== "" && column.style ? column.style(value) : "";
          cell.className = `${column.kind === "name" ? "name" : column.text ? "" : "n"} ${style}`.trim();
          if (value !== null) {
            cell.textContent = column.show(value);
            if (column.text) {
              cell.dir = "auto";
            } else if (cell.textContent !== String(value)) {
              cell.title = String(value);
            }
          }
          line.append(cell);
        }
        fragment.append(line);
      }
      body.replaceChildren(fragment);
      const of = found.length === rows.length ? "" : ` of ${grouping.format(rows.length)}`;
      const range = found.length > kRowsPerPage ? `, rows ${grouping.format(begin + 1)} to ${grouping.format(begin + shown.length)}` : "";
      output.textContent = `${grouping.format(found.length)}${of} ${noun}${range}`;
      pages.hidden = found.length <= kRowsPerPage;
      previous.disabled = page === 0;
      next.disabled = begin + kRowsPerPage >= found.length;
    }

    previous.addEventListener("click", () => { page -= 1; show(); });
    next.addEventListener("click", () => { page += 1; show(); });
    search.addEventListener("input", choose);
    search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || search.value === "") return;
      search.value = "";
      choose();
      event.preventDefault();
    });
    show();
    return {
      root,
      find(text) {
        search.value = text;
        choose();
        root.scrollIntoView({block: "start"});
        search.focus({preventScroll: true});
      },
    };
  }

  const tables = [...document.querySelectorAll(".table")].map(makeTable);
  // What marks and findings are looked for in: the first that lists parameters.
  const mainTable = tables.find((table) => ["parameters", "items"].includes(table.root.dataset.noun));

  function find(element) {
    const text = element.dataset.find;
    if (text && mainTable) mainTable.find(text);
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Charts
  // -------------------------------------------------------------------------------------------------------------------

  const tip = document.getElementById("tip");
  let pinned = null;  // the mark that the keyboard is at

  function hideTip() {
    tip.hidden = true;
  }

  /** Near the point, and inside the window. */
  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const room = 14;
    const {width, height} = tip.getBoundingClientRect();
    const left = x + room + width > window.innerWidth ? x - room - width : x + room;
    const top = y + room + height > window.innerHeight ? y - room - height : y + room;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }

  function showPinned() {
    const box = pinned.getBoundingClientRect();
    showTip(pinned.dataset.tip, box.left + box.width / 2, box.bottom);
  }

  document.addEventListener("pointermove", (event) => {
    const mark = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    if (mark) {
      pinned = null;
      showTip(mark.dataset.tip, event.clientX, event.clientY);
    } else if (!pinned) {
      hideTip();
    }
  });
  document.addEventListener("pointerleave", hideTip);
  document.addEventListener("scroll", () => (pinned ? showPinned() : hideTip()), {passive: true});
  document.addEventListener("click", (event) => {
    const mark = event.target instanceof Element ? event.target.closest("[data-find]") : null;
    if (mark) find(mark);
  });

  // The arrow keys go from mark to mark of the chart that has the focus; Enter finds it in the table.
  for (const chart of document.querySelectorAll("svg.chart")) {
    const marks = [...chart.querySelectorAll("[data-tip]")];
    let here = -1;
    const leave = () => {
      if (here >= 0) marks[here].classList.remove("here");
      here = -1;
      pinned = null;
      hideTip();
    };
    const go = (to) => {
      if (here >= 0) marks[here].classList.remove("here");
      here = Math.max(0, Math.min(marks.length - 1, to));
      marks[here].classList.add("here");
      pinned = marks[here];
      showPinned();
    };
    chart.addEventListener("keydown", (event) => {
      const steps = {ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: marks.length - 1};
      if (event.key in steps) {
        go(steps[event.key]);
      } else if (event.key === "Enter" && here >= 0) {
        find(marks[here]);
      } else if (event.key === "Escape") {
        leave();
      } else {
        return;
      }
      event.preventDefault();
    });
    chart.addEventListener("blur", leave);
  }

  // -------------------------------------------------------------------------------------------------------------------
  // Depths
  // -------------------------------------------------------------------------------------------------------------------

  for (const choices of document.querySelectorAll(".choices")) {
    const parts = choices.parentElement.querySelectorAll("[data-choice]");
    const choose = () => {
      const chosen = choices.querySelector("input:checked").value;
      for (const part of parts) part.hidden = part.dataset.choice !== chosen;
    };
    choices.addEventListener("change", choose);
    choose();
  }
})();
