// Gives the controls of the card beside this output roles and names that screen readers say, and makes each set of
// radio buttons one group, which arrow keys walk through. ipywidgets and JupyterLab do none of this.
(() => {
  const area = document.currentScript?.closest(".jp-OutputArea");
  if (!area) return;
  const named = (node, role, stem) => {
    node.setAttribute("role", role);
    if (stem) node.setAttribute("aria-labelledby", stem);
  };
  const unique = () => "minidist-" + Math.random().toString(36).slice(2);
  const name = () => {
    for (const card of area.querySelectorAll(".minidist-card")) {
      for (const control of card.querySelectorAll("input, select")) {
        control.dataset.lmSuppressShortcuts = "true"; // or arrow keys would leave the cell, and letters edit the lesson
      }
      let stem = "";
      for (const node of card.querySelectorAll(
        ".minidist-stem, .widget-radio-box, .minidist-group, .widget-text input, .widget-dropdown select")) {
        if (node.matches(".minidist-stem")) {
          node.id ||= unique();
          if (!stem) named(card, "group", node.id);
          stem = node.id;
        } else if (node.matches(".widget-radio-box")) {
          named(node, "radiogroup", stem);
          const group = node.querySelector("input")?.name || unique();
          for (const radio of node.querySelectorAll("input")) radio.name = group;
        } else if (node.matches(".minidist-group")) {
          named(node, "group", stem);
        } else if (stem) {
          node.setAttribute("aria-describedby", stem);
        }
      }
    }
  };
  new MutationObserver(name).observe(area, {childList: true, subtree: true});
  name();
})();
