"""The words of the synthetic receipts: shops, dishes, keys. Plain tuples, so that nothing depends on hash order."""

from __future__ import annotations

SHOPS = (
    "WARUNG SEDERHANA", "KOPI PAGI", "BAKSO PAK DARTO", "Roti & Butter", "DAPUR NUSANTARA", "SATE KHAS MADURA",
    "Pasta Piccola", "TEH TARIK CORNER", "Ayam Geprek 88", "RM PADANG RAYA", "Green Bowl", "TOKO KUE MELATI",
    "Mie Naga Merah", "BURGER LAB", "Depot Soto Lama", "SEAFOOD 212",
)  # fmt: skip
STREETS = ("Jl. Merdeka", "Jl. Sudirman", "Jl. Melati", "Jl. Gatot Subroto", "Jl. Diponegoro", "Jl. Kebon Jeruk")
CITIES = ("Jakarta", "Bandung", "Surabaya", "Medan", "Denpasar", "Yogyakarta", "Makassar")
CASHIERS = ("Ani", "Budi", "Citra", "Dewi", "Eko", "Fitri", "Gita", "Hadi")

DISHES = (
    "Nasi Goreng", "Mie Goreng", "Ayam Bakar", "Ayam Geprek", "Soto Ayam", "Sate Kambing", "Gado Gado", "Bakso",
    "Rendang", "Nasi Uduk", "Ikan Bakar", "Cah Kangkung", "Tahu Isi", "Martabak", "Beef Burger", "Chicken Katsu",
    "Fish & Chips", "Spaghetti", "Caesar Salad", "Club Sandwich", "French Fries", "Pancake", "Croissant", "Donut",
)  # fmt: skip
DISH_KINDS = (
    "", "", "Spesial", "Seafood", "Pedas", "Komplit", "Kampung", "Jumbo", "Original", "Crispy", "Sambal Matah",
    "Bolognese", "Cheese", "Lada Hitam", "Cinnamon Sugar", "Mozzarella", "Rica Rica", "Teriyaki",
)  # fmt: skip
DRINKS = (
    "Es Teh Manis", "Teh Tawar", "Es Jeruk", "Kopi Susu", "Cappuccino", "Caffe Latte", "Jus Alpukat", "Jus Mangga",
    "Mineral Water", "Es Campur", "Green Tea", "Hot Chocolate", "Lemon Tea", "Americano",
)  # fmt: skip
DRINK_KINDS = ("", "", "", "(R)", "(L)", "Panas", "Less Sugar", "Extra Shot", "Float")
EXTRAS = ("Extra Keju", "Telur", "Nasi Putih", "Sambal Ijo", "No Onion", "Less Ice", "Kerupuk", "Add Boba", "Bungkus")
NOTES = ("Take Away", "Dine In", "Promo", "Member")

SUBTOTAL_KEYS = ("Subtotal", "SUB TOTAL", "Sub-Total", "SUBTTL")
TOTAL_KEYS = ("TOTAL", "Total", "GRAND TOTAL", "Total Bayar", "JUMLAH")
TAX_KEYS = ("PB1 10%", "TAX 10%", "Pajak (10%)", "PPN 10%", "Tax")
SERVICE_KEYS = ("Service Charge", "SERVICE 5%", "Svc Chg", "Service")
OTHER_KEYS = ("Packing Fee", "Delivery", "Admin Fee")
DISCOUNT_KEYS = ("Discount", "DISC", "Potongan", "Promo Disc")
ROUNDING_KEYS = ("Rounding", "Pembulatan", "ROUND")
CASH_KEYS = ("CASH", "Tunai", "Cash", "BAYAR")
CHANGE_KEYS = ("CHANGE", "Kembali", "Change", "KEMBALIAN")
CARD_KEYS = ("DEBIT CARD", "Credit Card", "BCA CARD", "VISA")
EMONEY_KEYS = ("E-Money", "Voucher", "Points")
TYPE_KEYS = ("Total Item", "Items", "ITEM")
QUANTITY_KEYS = ("Total Qty", "Qty", "TOTAL QTY")
SAVING_KEYS = ("You Saved", "Anda Hemat", "Point Earned")
THANKS = ("TERIMA KASIH", "Thank You, Come Again", "Selamat Menikmati", "TERIMA KASIH ATAS KUNJUNGAN ANDA")
