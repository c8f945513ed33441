// A choice that takes effect at once; inline handlers are refused by the content security policy.
document.querySelectorAll("[data-submits]").forEach((field) => field.addEventListener("change", () => field.form.submit()));
